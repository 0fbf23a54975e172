"""Flight recorder: a file per rank with its last actions. It outlives the rank, and shows the first to hang or die."""
