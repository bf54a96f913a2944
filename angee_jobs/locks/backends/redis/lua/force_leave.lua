-- End the live shared and placed holds of a name, of any owner, and wake those who wait for it.
--
-- KEYS  the gate, the index, the members, the word of a waiter
-- ARGV  name, channel, the fencing token that it must have (16 digits; empty: any), what stands before an id in the key
--       of its hold
-- Returns the time in microseconds, the name below which a hold was that was ended, and that hold; or 0.

local found = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], string.format('(%.0f', now), '+inf')) do
    local hold = redis.call('GET', ARGV[4] .. id)
    if ends(hold) > now and (ARGV[3] == '' or string.sub(hold, 17, 32) == ARGV[3]) then
        found = {string.format('%.0f', now), ARGV[1] .. '\1' .. id, hold}
        remove(KEYS[2], KEYS[3], ARGV[4], ARGV[1], id)
    end
end
if found ~= 0 then
    close(KEYS[1], KEYS[2], KEYS[3], ARGV[1], KEYS[4])
    redis.pcall('PUBLISH', ARGV[2], '')
end
return found
