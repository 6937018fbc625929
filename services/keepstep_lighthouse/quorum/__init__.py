"""The quorum state machine of one job. Pure: events in, decisions out, time is an argument.

Duties of the caller:

1. Create a ``JobCore`` for each job from its stored record. Say whether members of it may be alive, and until when
   another lighthouse may confirm their quorum.
2. Number the sessions, and pass the events in the order in which they happened.
3. Carry out the decisions in their order, and none after a ``Persist`` whose success is not certain. On ``Opened``:
   write what the decisions require, send Welcome unless they end the session, then carry out the rest.
4. Pass ``Tick`` when ``deadline()`` has passed. Each event may change the deadline.

``machine`` passes an event to the feature that it concerns. Then ``settling`` lets the features act in their order, and
forms a quorum if ``forming/quorum_rules`` wants one. ``features`` creates all features. Each owns its state:

    ================  ================================================================================================
    room or file      its state, and its part of the stored record
    ================  ================================================================================================
    ``settling``      the verdict on the open requests, and how the last quorum was formed
    ``spares``        spares that leave when the job ends; record: orders to replace groups
    ``finishing``     failed heals of groups that finish; record: the state at which the job was closed
    ``orders``        record: policy, bans, evicted incarnations
    ``presence``      groups that were lost or left, how the last one went, misleading ports; record: how the job ended
    ``agreement``     settings and parameters of the last quorum, and what groups reported about their last steps
    ``verification``  steps at which weights are compared; record: groups that had to heal because they differed
    ``probation``     groups that are kept out, and the evidence against them
    ``forming``       number of the list of members; record: the members and the quorum_id
    ``takeover``      members that have not reconnected, and answers of the previous lighthouse
    ``job_state``     what several features share: record, members, round, the job's step; decisions for the event
    ``groups``        all about each group, its open request and its heal, and counts of groups for the rules
    ================  ================================================================================================

``heals``, ``retries``, ``stragglers``, and ``views`` have no state. ``events`` has the events and decisions,
``job_record`` the record.
"""
