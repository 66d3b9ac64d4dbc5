"""What a run will take, computed before it is started: memory, arithmetic, communication, time. No torch."""
