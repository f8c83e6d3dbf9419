"""Worker groups without a model, many in a process: what routers and gateways do at scale, on any machine."""
