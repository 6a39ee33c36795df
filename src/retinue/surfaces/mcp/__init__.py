"""Retinue as an MCP server: subagents for every MCP client, on stdio and on streamable HTTP."""
