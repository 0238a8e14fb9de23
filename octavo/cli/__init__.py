"""The command line. Imports torch only inside the commands that need it."""
