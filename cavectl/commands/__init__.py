"""One module for each group of commands, imported only when one of its commands is called."""
