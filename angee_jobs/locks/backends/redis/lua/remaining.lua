-- How long something is in the way of a waiter for at least, unless it is released.
--
-- KEYS  the hold or the gate, the members, the word of a waiter
-- ARGV  places (0: exclusive, -1: shared), for how many milliseconds an exclusive waiter's word stands
-- Returns microseconds, 0 if the lock may be free now.

local hold = redis.call('GET', KEYS[1])
local left = math.max(0, math.ceil(ends(hold) - now))
if not hold or owner_of(hold) ~= GATE or (left == 0 and ARGV[1] == '0') then
    return left
end
local token = string.sub(hold, 17, 32)
if ARGV[1] == '0' then
    -- A waiter that soon gives up does not shorten the word of another. With pcall: it is for fairness.
    local stands = redis.pcall('GET', KEYS[3]) == token and redis.call('PTTL', KEYS[3]) or 0
    redis.pcall('SET', KEYS[3], token, 'PX', math.max(stands, tonumber(ARGV[2])))
    return left
end
if redis.pcall('GET', KEYS[3]) == token then
    return math.max(1000, redis.call('PTTL', KEYS[3]) * 1000)
end
local places, held, first = tonumber(ARGV[1]), 0, math.huge
local live = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', now), '+inf', 'WITHSCORES')
for i = 1, #live, 2 do
    if #live[i] < 64 and tonumber(live[i]) < places then
        held, first = held + 1, math.min(first, tonumber(live[i + 1]))
    end
end
return places > 0 and held >= places and math.ceil(first - now) or 0
