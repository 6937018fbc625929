"""Process groups and mesh of a world, which stay while members change."""
