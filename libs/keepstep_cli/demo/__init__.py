"""Direct and show the demo."""
