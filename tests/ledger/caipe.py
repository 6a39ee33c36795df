"""Seed 003 (CAIPE): remote subagents over A2A, live notices, nothing twice."""
# A table reads best with one row a line.
# fmt: off

from tests.ledger.shape import Requirement

REQUIREMENTS = [
    Requirement("CAIPE-1", "The user reads `🔧 Supervisor: Calling Argocd...` when a remote subagent is called.", "seed 003, Problem"),
    Requirement("CAIPE-2", "The user reads `🔧 Argocd: Calling tool: Version_Service__Version` when it calls a tool.", "seed 003, Problem"),
    Requirement("CAIPE-3", "The user reads `✅ Argocd: Tool Version_Service__Version completed` when that tool is done.", "seed 003, Problem"),
    Requirement("CAIPE-4", "The user reads `✅ Supervisor: Argocd completed` when the remote subagent is done.", "seed 003, Problem"),
    Requirement("CAIPE-5", "Content is streamed once, never twice.", "seed 003, Problem"),
    Requirement("CAIPE-6", "Notices contain no markdown emphasis.", "seed 003, Problem"),
    Requirement("CAIPE-7", "Notices title-case agent and tool names and keep underscores.", "seed 003, Problem and Diagram"),
    Requirement("CAIPE-8", "The user sees plan, supervisor start, child tool start, child tool end, supervisor end, tokens and final response, in this order.", "seed 003, Diagram"),
    Requirement("CAIPE-9", "Typed metadata tells notices, which are streamed, from text, which is only kept; the emoji is parsed for foreign agents only.", "seed 003, Diagram"),
    Requirement("CAIPE-10", "The tool's return value is the response text without the notices.", "seed 003, Diagram"),
    Requirement("CAIPE-11", "Events of the child and tokens of the parent arrive on the same stream, always.", "seed 003, Diagram"),
    Requirement("CAIPE-12", "A task event has kind `task`, states submitted, working, completed, history, id and contextId on the 0.3 wire; the 1.0 wire is served too.", "seed 003, Task event"),
    Requirement("CAIPE-13", "Every stream starts with a `task` event in state submitted.", "seed 003, Task event"),
    Requirement("CAIPE-14", "A status event has kind `status-update`, `final`, state, message parts, taskId and contextId, and its message kind, messageId and the role agent.", "seed 003, Status event"),
    Requirement("CAIPE-15", "Status events are not final while working; the last one is final, completed and has no message.", "seed 003, Status event"),
    Requirement("CAIPE-16", "A child's status events are tool start, tool end, response and completion, only the last one final.", "seed 003, Status event"),
    Requirement("CAIPE-17", "An artifact event has kind `artifact-update`, `append`, `lastChunk`, and an artifact with id, name, description and parts.", "seed 003, Artifact event"),
    Requirement("CAIPE-18", "Artifacts are named `tool_notification_start`, `tool_notification_end` and `streaming_result`, and a child's `current_result`.", "seed 003, Artifact event"),
    Requirement("CAIPE-19", "Start and end notices are new artifacts; `streaming_result` is appended to by each token.", "seed 003, Artifact event"),
    Requirement("CAIPE-20", "A child ends with an empty `current_result` marked as last chunk.", "seed 003, Artifact event"),
    Requirement("CAIPE-21", "A start notice is described as `Tool call started: argocd`, with the agent's name.", "seed 003, Artifact event"),
    Requirement("CAIPE-22", "A request is an HTTP POST of `message/stream`; a missing `jsonrpc` is accepted, and we always send it.", "seed 003, Protocol"),
    Requirement("CAIPE-23", "The response is a stream of server-sent events, each a JSON-RPC result that echoes the request's id.", "seed 003, Protocol"),
    Requirement("CAIPE-24", "Supervisor and subagent are separate processes, and taskId and contextId stay the same through a stream.", "seed 003, Protocol"),
    Requirement("CAIPE-25", "A child's stream is task, tool start, tool end, response, last artifact chunk, final status.", "seed 003, Timeline"),
    Requirement("CAIPE-26", "Events without status, message, parts or text are skipped without error, and all parts are read.", "seed 003, Client processing"),
    Requirement("CAIPE-27", "A tool's start, the model's tokens and a tool's end become start notice, `streaming_result` and end notice.", "seed 003, Supervisor processing"),
    Requirement("CAIPE-28", "A client that disconnects is logged and ends both loops quietly, without a server error.", "seed 003, Error handling"),
    Requirement("CAIPE-29", "A child's event carries the run it came from and never completes the parent.", "seed 003, Custom handler"),
    Requirement("CAIPE-30", "Each processed status is logged at INFO with the number of characters streamed and kept.", "seed 003, Logging"),
    Requirement("CAIPE-31", "An execution plan between `⟦` and `⟧` reaches the user.", "seed 003, Working events"),
    Requirement("CAIPE-32", "No kind of event is lost by the way of delivery, and tokens still stream.", "seed 003, Options"),
    Requirement("CAIPE-33", "The seed's curl command, with its address replaced, shows these events.", "seed 003, Testing"),
]
