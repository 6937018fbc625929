"""Services under test, in the test's loop or in processes of their own, and clients that speak their protocols."""
