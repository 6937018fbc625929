"""Samples for groups that come and go: which ones each rank takes in a step. ``keepstep.data`` exports the names.

``permutation`` and ``shares`` are pure; ``elastic_sampler`` asks the Manager; ``elastic_loader`` loads ahead.
"""
