"""``keepstep chaos``: draw faults from a seed, inject them into a running job, measure what they cost, and report it.

``vocabulary``, ``schedule``, ``recovery``, and ``verdict`` are pure: they decide which fault comes next, who has
recovered, and what was broken, with time as an argument. ``observing`` finds the processes and reads their logs,
``injecting`` hits them, ``engine`` connects them, and ``histories`` checks the logs of the run.
"""
