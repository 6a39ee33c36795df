"""The MCP client: servers, their connections, and their tools as host-side tools. Imported only if servers are
configured.
"""
