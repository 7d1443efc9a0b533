"""Files, segments, indexes, producer state, leader epochs, partition logs, recovery, retention."""
