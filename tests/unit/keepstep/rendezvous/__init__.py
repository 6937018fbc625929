"""keepstep.rendezvous."""
