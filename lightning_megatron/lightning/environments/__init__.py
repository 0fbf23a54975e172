"""Cluster environments: ranks that another program has started, and their rendezvous address."""
