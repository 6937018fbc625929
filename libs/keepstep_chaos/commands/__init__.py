"""The commands of this package. ``keepstep`` loads each when it is used."""
