"""Fault runs on real processes and a real etcd (``make faults``)."""
