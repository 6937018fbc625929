"""The virtual machine room: time, networks, processes and the store of the lighthouses."""
