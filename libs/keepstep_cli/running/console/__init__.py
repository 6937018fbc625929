"""Write the output of ranks and the messages of a command: to the terminal and to files."""
