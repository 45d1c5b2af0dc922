"""One module a command: composes the rooms below, says nothing itself but through the console's views."""
