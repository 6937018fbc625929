"""Training frameworks and data libraries on keepstep, an optional extra each. Nothing else imports this room.

Lightning, Transformers and Accelerate train as groups; Grain and Hugging Face ``datasets`` give them their samples.
"""
