"""Public: conversion of checkpoints between keepstep and other programs. docs/interchange.md shows it in use."""

from keepstep_formats.interchange import *  # noqa: F403
