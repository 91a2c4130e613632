"""What smdistributed.dataparallel and smdistributed.modelparallel share."""
