"""Everything that touches SGLang: server, client, trajectories, weight sync."""
