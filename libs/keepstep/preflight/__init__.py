"""Checks of this machine before its group joins the job."""
