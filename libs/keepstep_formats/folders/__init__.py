"""Folders of other programs: which program wrote them, and which of their files make one checkpoint."""
