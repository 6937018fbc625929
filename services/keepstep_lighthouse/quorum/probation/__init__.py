"""Groups that keep others from committing: the evidence, and how they are parted and let in again. Pure."""
