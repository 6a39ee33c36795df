"""The A2A surface: a served profile is an agent that any A2A client can talk to. Importing it loads `a2a-sdk`."""
