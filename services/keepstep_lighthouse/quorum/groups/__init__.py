"""Groups as the lighthouse knows them, indexed and counted for the rules. Pure."""
