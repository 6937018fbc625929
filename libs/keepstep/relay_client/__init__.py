"""The client of relays: the only code outside of the service that knows their URLs. Needs no torch.

``relay_paths`` has the URLs, ``relay_requests`` the requests about one checkpoint, ``relay_link`` the connections and
the repetition of requests, ``uploading`` the upload of one rank. docs/relay.md describes the protocol.
"""
