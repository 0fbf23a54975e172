"""Cluster environments: ranks that another program has started, and the place where they meet."""
