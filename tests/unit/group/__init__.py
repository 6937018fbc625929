"""keepstep.group and keepstep.rendezvous."""
