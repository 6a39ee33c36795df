"""The A2A surface: serves a profile as an agent for any A2A client. Importing it loads `a2a-sdk`."""
