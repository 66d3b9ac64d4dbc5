"""The paper's tables, measured: an application on top of all rooms, which uses the commands as processes. No torch."""
