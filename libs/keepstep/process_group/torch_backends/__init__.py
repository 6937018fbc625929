"""Process groups that communicate through one of torch's backends: Gloo, NCCL, and XCCL."""
