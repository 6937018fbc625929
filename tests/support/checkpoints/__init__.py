"""Both ends of a checkpoint transfer, and the stored bytes of an old one."""
