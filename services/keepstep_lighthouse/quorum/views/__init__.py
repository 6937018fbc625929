"""Views for operators: the quorum, each group, the state of the job, and the reasons. Pure."""
