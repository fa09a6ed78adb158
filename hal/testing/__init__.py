"""What authors of platforms and backends test with."""
