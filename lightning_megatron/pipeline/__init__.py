"""Pipeline parallelism: schedules as data, what they cost, and who holds which layer."""
