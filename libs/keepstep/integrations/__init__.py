"""Training frameworks on keepstep, an optional extra each. Nothing else imports this room."""
