"""Workspaces that are a copy of something: made, looked at afterwards, and applied. Everything here blocks, and runs
in threads; nothing here runs a model or a tool. What a run left is read as data, by descriptors, never by git."""
