"""Further processes of one relay: they serve its connections too, and the main process keeps all decisions."""
