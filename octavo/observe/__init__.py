"""Numbers for those who watch an engine from outside."""
