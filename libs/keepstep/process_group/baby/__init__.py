"""Process groups whose backend runs in a child process, which can be killed."""
