"""Turn a state dict into bytes and back: flatten, describe, stage, restore."""
