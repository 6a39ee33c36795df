"""The MCP client: servers, their connections, and their tools as host-side tools. Loaded where some are named."""
