"""Pipeline parallelism: schedules as data, their costs, and the layers of each stage."""
