"""Ways in and out for people and programs. They read views and send commands, and know nothing of each other."""
