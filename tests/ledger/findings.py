"""Findings of the outside verification of the first version, each as the behaviour that closes it.

A test that reproduces a finding (it fails on the code that had it) cites it: `@pytest.mark.finding("X1")`.
`OPEN` lists the findings that are not closed yet. A test may already cite an open finding; a closed one has at least
one. Take an id out when its whole class is closed; never put one back.
"""
# A table reads best with one row a line.
# fmt: off

from tests.ledger.shape import Requirement

FINDINGS = (
    Requirement("S1", "A model inside a tree lists, waits for, cancels and continues subagents with the same tools as an MCP client.", "verification, seeds"),
    Requirement("S2", "A parent model reads each profile's description and expected input before it chooses one.", "verification, seeds"),
    Requirement("S3", "Every text a model says to the user is shown exactly once, also when the run continues after it or nobody fetches a background result.", "verification, seeds"),
    Requirement("S4", "A person can grant readable folders outside the project to a run, and a model can pass on what its run has.", "verification, seeds"),
    Requirement("S5", "The metrics summary counts the whole tree to its end, and status, live logs and summary exist for every way of spawning.", "verification, seeds"),
    Requirement("S6", "`retinue mcp serve` without an inherited collector address starts no collector and injects no variable.", "verification, seeds"),
    Requirement("S7", "A question from a subagent behind an MCP server shows that subagent's number and label.", "verification, seeds"),
    Requirement("S8", "Seed 001's progress events reach the parent's thread with the seed's values, tools have loop hooks, and each store has its own factory.", "verification, seeds"),
    Requirement("S9", "Telemetry tells delegated runs from primaries and propagates baggage.", "verification, seeds"),
    Requirement("S10", "`spawn_agent` takes a task and a `task_context`, and an unknown argument of a built-in tool is an error that the model reads.", "verification, seeds"),
    Requirement("S11", "The outbox watcher answers every request id that our own formats allow, and a request file carries its `subagent_id`.", "verification, seeds"),
    Requirement("S12", "A fallback mode is accepted only where it can take effect.", "verification, seeds"),
    Requirement("S13", "Each test that cites a requirement asserts its words and fails without the behaviour.", "verification, seeds"),
    Requirement("X1", "State in `.retinue` counts only if this user made it here; recovery and resume never exceed the project or the user's own settings.", "verification, security"),
    Requirement("X2", "Configuration and state that another user owns or may write are refused, wherever the project is found.", "verification, security"),
    Requirement("X3", "File tools never write inside `.git`, in any spelling, runtime or mode.", "verification, security"),
    Requirement("X4", "Every surface can show the whole action of an approval, and a yes covers exactly that.", "verification, security"),
    Requirement("X5", "A path rule holds for every tool that reads or writes the path.", "verification, security"),
    Requirement("X6", "A sandboxed run in a worktree sees neither the project's ignored files nor git's secrets nor another repository's objects.", "verification, security"),
    Requirement("X7", "A command of an inherited run cannot read the environment or the memory of the host process.", "verification, security"),
    Requirement("X8", "Input from files and peers never costs unbounded time or memory.", "verification, security"),
    Requirement("X9", "A command that cannot be read for sure asks when a deny rule could apply to it, in every mode.", "verification, security"),
    Requirement("R1", "Reading commands cost what their answer is long, not what the log is long.", "verification, reliability"),
    Requirement("R2", "Tool arguments that cannot be stored or sent never reach a run's thread; the model is told.", "verification, reliability"),
    Requirement("R3", "A budget counts what was spent, or estimates it and says so.", "verification, reliability"),
    Requirement("R4", "A run whose log or state folder vanishes notices it and fails.", "verification, reliability"),
    Requirement("R5", "State and temporary folders are never part of a copied workspace, and leftovers of killed processes are swept.", "verification, reliability"),
    Requirement("R6", "Folders with the wrong owner or mode get a sentence that says what to do, never an internal error.", "verification, reliability"),
    Requirement("R7", "After an MCP server was killed, resume goes on with its subagents and other trees can be resumed.", "verification, reliability"),
    Requirement("R8", "Damage to the log costs what it touches, and `doctor` finds it.", "verification, reliability"),
    Requirement("R9", "A full disk, a full stdout and a long Retry-After are said plainly.", "verification, reliability"),
    Requirement("R10", "The suite passes with inherited ignored signals.", "verification, reliability"),
    Requirement("R11", "The suite passes for an ordinary user with the distribution's own Python, beside another user's run.", "verification, reliability"),
    Requirement("M1", "`mcp install` leaves a configuration in which each client passes the provider's key, model and base URL on.", "verification, MCP clients"),
    Requirement("M2", "One Enter approves where the client allows it.", "verification, MCP clients"),
    Requirement("M3", "A cancelled approval form falls back to waiting for `retinue approve`.", "verification, MCP clients"),
    Requirement("M4", "Files that an MCP tool returns are where the run that called it can read them.", "verification, MCP clients"),
    Requirement("M5", "Over HTTP the subagents of a client that left end after a documented limit.", "verification, MCP clients"),
    Requirement("M6", "A client's next session can continue a subagent that a killed server interrupted.", "verification, MCP clients"),
    Requirement("M7", "The server answers only what it declares.", "verification, MCP clients"),
    Requirement("M8", "Changed tools, foreign runs, unknown ids, unknown content and long lists are shown for what they are.", "verification, MCP clients"),
    Requirement("U1", "The documented install can call a model, and hints fit the installer.", "verification, first use"),
    Requirement("U2", "Spawning a profile that the user made available does not ask.", "verification, first use"),
    Requirement("U3", "`continue` starts from the files that the old run left.", "verification, first use"),
    Requirement("U4", "A limit that the first request cannot meet is refused or warned about.", "verification, first use"),
    Requirement("U5", "A wrong approver raises where it is given and fails its call loudly.", "verification, first use"),
    Requirement("U6", "The library is typed: approvers, event bodies, outputs, options; it has a token stream and built-in profiles by name.", "verification, first use"),
    Requirement("U7", "Errors about git, providers, keys and ambiguous runs name what is wrong and what to do.", "verification, first use"),
    Requirement("U8", "A harmless pipeline can have a rule, and a refusal to make one says why.", "verification, first use"),
    Requirement("U9", "README, docs, help and errors are written in plain English.", "verification, first use"),
)

OPEN: frozenset[str] = frozenset()
