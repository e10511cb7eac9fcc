"""What a run says about itself: metric names, meters, sinks and reports."""
