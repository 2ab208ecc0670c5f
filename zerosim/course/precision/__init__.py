"""None"""





