"""Parts of a state that one rank holds or writes, and the bytes that it writes."""
